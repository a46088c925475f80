"""Execution of programs on torch processes: modules, islands, transports, ranks."""
