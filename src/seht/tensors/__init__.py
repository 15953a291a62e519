"""Tensors, the graphs behind them and the state around them; knows nothing of estimates."""
