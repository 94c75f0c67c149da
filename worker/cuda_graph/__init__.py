"""The training step as CUDA graphs: whole iterations replayed, checks and an update gate inside. See docs/cuda_graph.md."""
