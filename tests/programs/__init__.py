"""Programs in the style of public ones, run under torch and under paceline."""
