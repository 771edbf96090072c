"""Recipes for ddpexp."""
