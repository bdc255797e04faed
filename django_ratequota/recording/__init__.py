"""Each change of the policies: checked, kept in the history, published on commit. Imports no model."""
