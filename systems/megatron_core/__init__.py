"""megatron-core running as itself: its GPTModel, all-to-all dispatcher, schedules, DDP and optimizer train a case.

It is given, as its own layer specs allow, this harness's attention core, linears, grouped experts and SwiGLU, so that
it and a plan of this harness run on the same kernels; the same initial weights by name, the same sequences, and
experts to take where the workload forces them.
"""
