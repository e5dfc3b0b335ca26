"""Spans, counters, gauges and logs of a process, on one clock."""
