"""Recipes, the configuration of trainings, and the data and models that they select."""
