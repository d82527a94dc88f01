"""Compiled loops for CPUs."""
