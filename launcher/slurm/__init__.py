"""What runs under SLURM: the gate and the hooks of a node, and the launch inside a job. Importing this imports nothing."""
