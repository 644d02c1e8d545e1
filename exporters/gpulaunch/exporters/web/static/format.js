// Values as people read them. What is not known is a dash, never a zero.

export const DASH = "\u2013";

const OBEYED =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Text of other people with what one cannot see, or what turns it around, made visible. */
export function inert(text) {
  return String(text).replace(OBEYED, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function number(value, digits = 3) {
  if (!known(value)) return DASH;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.trunc(Math.abs(value)).toString().length) });
}

export function percent(ratio) {
  return known(ratio) ? `${(100 * ratio).toFixed(ratio !== 0 && Math.abs(ratio) < 0.1 ? 1 : 0)} %` : DASH;
}

export function seconds(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${number(value * 1e6)} \u00b5s`;
  if (size < 1) return `${number(value * 1e3)} ms`;
  if (size < 120) return `${number(value)} s`;
  const whole = Math.round(value);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (!known(value)) return DASH;
  const power = value ? Math.min(SIZES.length - 1, Math.max(0, Math.floor(Math.log2(Math.abs(value)) / 10))) : 0;
  return `${number(value / 1024 ** power)} ${SIZES[power]}`;
}

export function hertz(value) {
  const [divisor, unit] = [[1e9, "GHz"], [1e6, "MHz"], [1e3, "kHz"]].find(([one]) => Math.abs(value) >= one) ?? [1, "Hz"];
  return known(value) ? `${number(value / divisor)} ${unit}` : DASH;
}

/** How a chart shows values of a unit as large as these: [divide by, what to call it]. */
export function scale(unit, largest) {
  if (unit === "bytes" || unit === "bytes/s") {
    const power = largest > 0 ? Math.min(SIZES.length - 1, Math.max(0, Math.floor(Math.log2(largest) / 10))) : 0;
    return [1024 ** power, SIZES[power] + unit.slice(5)];
  }
  if (unit === "seconds") {
    if (largest < 1) return largest < 1e-3 ? [1e-6, "\u00b5s"] : [1e-3, "ms"];
    if (largest < 7200) return largest < 120 ? [1, "s"] : [60, "min"];
    return largest < 172800 ? [3600, "h"] : [86400, "d"];
  }
  if (unit === "ratio") return [0.01, "%"];
  return [1, unit];
}

export function inUnit(unit, value) {
  if (unit === "bytes") return bytes(value);
  if (unit === "bytes/s") return known(value) ? `${bytes(value)}/s` : DASH;
  if (unit === "seconds") return seconds(value);
  if (unit === "ratio") return percent(value);
  if (unit === "hertz") return hertz(value);
  return number(value);
}

/** The time of day, with the date if it is another day. */
export function clock(unix) {
  if (!known(unix)) return DASH;
  const moment = new Date(unix * 1000);
  const time = moment.toLocaleTimeString("en-GB");
  return moment.toDateString() === new Date().toDateString() ? time : `${day(moment)} ${time}`;
}

function day(moment) {
  const two = (value) => String(value).padStart(2, "0");
  return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
}

/** Local time as the chart library takes it: it knows no zones. */
export function axisTime(unix) {
  const moment = new Date(unix * 1000);
  return `${day(moment)} ${moment.toTimeString().slice(0, 8)}.${String(moment.getMilliseconds()).padStart(3, "0")}`;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

export function ranks(list) {
  if (!list.length) return DASH;
  const parts = [];
  for (let at = 0; at < list.length; ) {
    let end = at;
    while (end + 1 < list.length && list[end + 1] === list[end] + 1) end += 1;
    parts.push(end > at ? `${list[at]}-${list[end]}` : `${list[at]}`);
    at = end + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")}, ...` : parts.join(", ");
}
