"""The methods of the paper and their rivals."""
