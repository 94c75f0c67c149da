"""What a run says about itself: training log, timers, stragglers, memory, dumps, energy and end-to-end metrics."""
