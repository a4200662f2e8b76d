"""Levels and scales chosen with error feedback, by the covariance of what a weight multiplies."""
