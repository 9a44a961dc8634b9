"""Tests of gateway/fleet."""
