"""Rerun: was it the GPU, the data, or a cosmic ray? Import names from `rsup.worker.rerun.state_machine` and its neighbours."""
