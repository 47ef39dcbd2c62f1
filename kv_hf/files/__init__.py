"""Files of users: read with a limit, written aside and renamed. Knows no format but JSON, and no model."""
