"""Maintenance of datasets: what repairs, merges, compacts and collects, above readers and writers.

Spec: section "Maintenance". Nothing here changes a committed object; only `gc` removes any.
"""
