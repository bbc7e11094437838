"""The lab: evaluation of trained models at growing context lengths."""
