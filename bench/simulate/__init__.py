"""A discrete-event simulation of a program on every rank, with queues, ports and shared SMs: see `engine`."""

from bench.simulate.memory import least_peak_bytes, peak_bytes
from bench.simulate.run import Step, simulate, simulate_with_peaks, time_step

__all__ = ["Step", "least_peak_bytes", "peak_bytes", "simulate", "simulate_with_peaks", "time_step"]
