"""The planner: how many GPUs and how much network attention and experts each get, why, and when that changes."""
