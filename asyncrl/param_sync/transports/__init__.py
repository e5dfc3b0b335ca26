"""Transports, one module each: they carry buckets from senders to replicas."""
