"""DisagMoE: attention and experts on disjoint groups of GPUs, run by the AF-Pipe schedule."""
