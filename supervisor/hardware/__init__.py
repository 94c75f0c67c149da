"""The history of devices and nodes: what speaks against each, which state follows, and what people decide about it.

`device_machine` (pure) turns evidence, time and people's words into states; `policy` and its data file say how much each kind
of evidence weighs; `book` keeps what is not clear in memory for the supervisor's loop, and commits with it.
"""
