"""The peers, the physical limits and Taskyard, measured side by side.

`python -m benchmarks` runs every scenario. A reading is taken in a fresh process; the sides of a scenario take
turns, round after round, because a machine drifts by more than most differences worth knowing. Only ratios of
readings from the same round are judged, and only when every side's store holds everything it was given.

`bars` says what must be reached, `scenarios` what is compared, `ours`, `peers` and `limits` how each side does it.
"""
