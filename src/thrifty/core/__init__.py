"""Core types of Thrifty: recipe, technique, batch, objective, gradient transform, state. Imports no other package of
Thrifty."""
