"""Reads torch-profiler (Kineto) traces of any trainer and says where the time of each GPU went."""

from bench.kineto.classes import KernelTable, read_table
from bench.kineto.times import Analysis
from bench.kineto.traces import analyze_traces, trace_files

__all__ = ["Analysis", "KernelTable", "analyze_traces", "read_table", "trace_files"]
