"""Renderers: pure functions from results to text or JSON. They compute nothing."""
