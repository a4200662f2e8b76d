"""Levels and scales chosen with error feedback (GPTQ, LDLQ), by the covariance of a matrix's inputs."""
