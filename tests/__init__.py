"""Tests, in the rooms of the code, plus contracts, e2e and faults."""
