"""The SDC screen behind `rsup devices test`: does a device compute the same bits every time, and the right ones?

`command` chooses the devices and starts one process each (`one_device`), which runs the `computations` over and over (`screen`)
and compares them with themselves and with float64 (`float64_bound`). `judging` then compares like devices with each other and
with what such devices computed before. A pass lowers suspicion, it proves no health: silent corruption depends on data, heat
and voltage, so duration, clocks and temperatures are kept with the result.
"""
