"""The steps of a conversion: copy, trace, plan, and change in place."""
