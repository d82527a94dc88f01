"""Weights: read from anywhere (sources), put into models (build); ``vil.convert`` changes names and shapes."""
