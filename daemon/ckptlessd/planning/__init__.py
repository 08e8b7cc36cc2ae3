"""Pure: which faults there are, and the plan of the next generation that follows from them."""
