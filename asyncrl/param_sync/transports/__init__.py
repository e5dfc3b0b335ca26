"""Transports: the ways for buckets to travel from senders to replicas, one module each."""
