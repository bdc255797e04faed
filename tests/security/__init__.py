"""Attacks on the request side, each as the attacker would do it."""
