"""Checks beside the tests: a GPU emulator, injected faults, and a bit-exact comparison of two checkouts."""
