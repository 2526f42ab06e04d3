"""Reading: HiddenStateDataset, trainer views, verification and foreign source formats."""
