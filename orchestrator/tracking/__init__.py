"""The record of a run: its folder, its metrics, its summary, MLflow."""
