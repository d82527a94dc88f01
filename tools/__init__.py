"""What shows that the library is right, beside its tests: an emulator of GPUs, injected faults, bits of two checkouts."""
