/* Numbers for people. */
"use strict";

const Words = (() => {
  const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

  const count = (n) => Math.round(n).toString().replace(/\B(?=(\d{3})+(?!\d))/g, ",");

  /* Three digits that count. */
  function digits(value) {
    if (value >= 100) return count(value);
    return value >= 10 ? value.toFixed(1) : value.toFixed(2);
  }

  function bytes(value) {
    let [size, unit] = [value, 0];
    while (size >= 1024 && unit < UNITS.length - 1) [size, unit] = [size / 1024, unit + 1];
    return unit === 0 ? `${Number.isInteger(size) ? count(size) : size.toFixed(1)} bytes` : `${digits(size)} ${UNITS[unit]}`;
  }

  const exactBytes = (value) => (Number.isInteger(value) ? count(value) : count(Math.floor(value)) + (value % 1).toFixed(2).slice(1));

  /* 8,192; 131,072 and above as 128 Ki. */
  const ticks = (tokens) => (tokens >= 2 ** 20 ? `${tokens / 2 ** 20}M` : tokens >= 1024 ? `${tokens / 1024}k` : String(tokens));

  /* A number in a field: 8,192 or 0.5. */
  const plain = (value) => (Number.isInteger(value) ? count(value) : String(value));

  const ratio = (value) => `${value >= 100 ? count(value) : value.toFixed(2)}×`;

  /* What a ratio of a larger to a smaller number says. */
  const compared = (value) => (value >= 1 ? `${ratio(value)} less` : `${ratio(1 / value)} as much`);

  function speed(value) {
    return value >= 1000 ? count(value) : value >= 10 ? value.toFixed(0) : value.toFixed(1);
  }

  const plural = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;

  function divergence(kl) {
    if (kl < 1e-6) return "< 0.000001";
    return kl.toPrecision(2).includes("e") ? kl.toFixed(7).replace(/0+$/, "") : kl.toPrecision(2);
  }

  return { bytes, compared, count, digits, divergence, exactBytes, plain, plural, ratio, speed, ticks };
})();
