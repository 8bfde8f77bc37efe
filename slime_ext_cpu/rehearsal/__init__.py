"""Rehearses a launch script with two small rollouts, and reports what they show."""
