"""Speech features, extracted once and read at memory speed."""
