"""The benchmark harness: models, clusters, plans, simulation and execution of MoE training."""
