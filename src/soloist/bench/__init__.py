"""Measurement: a workload card, interleaved runs, and results that refuse to be compared with what they are not like."""
