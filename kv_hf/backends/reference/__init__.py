"""The definition in readable torch: what every other backend is tested against."""
