"""Measuring a served policy from the robot's end: how long a call takes and where its time goes. Imports no torch."""
