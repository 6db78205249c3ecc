"""Groups that others wrote in Python, under our interface."""
