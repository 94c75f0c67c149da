"use strict";
// A reference page of the REST interface from /openapi.json, without assets from elsewhere.

function element(tag, { text, cls } = {}, children = []) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  if (cls) node.className = cls;
  node.append(...children);
  return node;
}

function parameterLine(one) {
  const schema = one.schema || {};
  const kind = schema.type || (schema.anyOf || []).map((part) => part.type).filter(Boolean).join(" or ");
  const normal = schema.default === undefined || schema.default === "" ? "" : `, default ${schema.default}`;
  return element("li", {}, [element("code", { text: one.name }), ` ${one.in}, ${kind}${normal}${one.description ? `: ${one.description}` : ""}`]);
}

function bodyLines(body, schemas) {
  const reference = body && body.content["application/json"].schema;
  const name = JSON.stringify(reference || {}).match(/schemas\/(\w+)/);
  const properties = name ? schemas[name[1]].properties : {};
  return Object.entries(properties).map(([field, schema]) =>
    element("li", {}, [element("code", { text: field }), ` body, ${schema.type}${schema.description ? `: ${schema.description}` : ""}`]));
}

async function draw() {
  const api = await (await fetch("/openapi.json")).json();
  const schemas = (api.components || {}).schemas || {};
  document.getElementById("title").textContent = `${api.info.title} ${api.info.version}`;
  document.getElementById("about").textContent = api.info.description;
  for (const [path, verbs] of Object.entries(api.paths)) {
    for (const [verb, route] of Object.entries(verbs)) {
      const lines = [...(route.parameters || []).map(parameterLine), ...bodyLines(route.requestBody, schemas)];
      document.getElementById("routes").append(element("section", {}, [
        element("h2", {}, [element("span", { text: verb.toUpperCase(), cls: "verb" }), element("code", { text: path })]),
        element("p", { text: route.description || route.summary }),
        element("ul", {}, lines),
      ]));
    }
  }
}

draw().catch((error) => { document.getElementById("about").textContent = `The API's description cannot be read: ${error.message}`; });
