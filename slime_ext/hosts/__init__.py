"""Knows facts about the hosts, slime and miles, and how to read them. Nothing here runs in a trainer."""
