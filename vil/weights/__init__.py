"""Weights: read from anywhere (files), adapted to a backbone (adapt), put into models (build)."""
