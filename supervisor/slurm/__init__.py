"""What the supervisor does in a SLURM cluster: the signed snapshot that gates read, drains of nodes, and the guard over both.

`guard`, `node_log`, `drain_plan` and `snapshot` are pure; `scheduler` speaks to `scontrol`, `signing` keeps the key, and
`drain_keeper` is the thread that puts them together.
"""
