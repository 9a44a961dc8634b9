"""Tests of compression."""
