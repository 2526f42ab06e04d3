"""A reader written from the spec alone: it shares no code with the library, and checks every rule that it can.

Slow and whole: it loads all of a dataset. Tests compare it with the library on every vector; a refusal names its rule.
Used as a program it prints the samples: `python spec/reference DATASET`.
"""
