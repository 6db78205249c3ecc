"""What is particular to gloo: its connections, and two ranks over it."""
