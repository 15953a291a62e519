"""In which precision the passes of an estimate run."""
